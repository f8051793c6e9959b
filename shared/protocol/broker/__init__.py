"""The queue between gateway and worker: one method per verb of the protocol, each a script or one command.

Every script is repeatable: when a call fails its effect is unknown, and the caller may make the same call again.
docs/protocol.md states the invariants that the scripts keep.
"""

from __future__ import annotations

from quire.shared.protocol.admission import Admission, QueueBounds
from quire.shared.protocol.broker.adapters import AdapterVerbs, Announcement
from quire.shared.protocol.broker.commit import CommitVerb, ComputedTokens, PackedStep, StepCommit, StepReply
from quire.shared.protocol.broker.conversations import ConversationVerbs, KeptConversation
from quire.shared.protocol.broker.gateway import (
    Attachment,
    ConversationLocked,
    DeadlineUnreachable,
    FilesLost,
    GatewayVerbs,
    IdempotencyConflict,
    LastBeat,
    NoRoom,
    QueueFull,
    Submitted,
)
from quire.shared.protocol.broker.lane import new_id
from quire.shared.protocol.broker.operators import DeadRequest, OperatorVerbs
from quire.shared.protocol.broker.parking import ParkedRequest, ParkingVerbs
from quire.shared.protocol.broker.reader import QueueReader, StreamEntry
from quire.shared.protocol.broker.registration import NameHolder, RegistrationVerbs
from quire.shared.protocol.broker.worker import MAX_DEATHS, Claim, WorkerVerbs

__all__ = [
    "MAX_DEATHS",
    "Admission",
    "Announcement",
    "Attachment",
    "Broker",
    "Claim",
    "ComputedTokens",
    "ConversationLocked",
    "DeadRequest",
    "DeadlineUnreachable",
    "FilesLost",
    "IdempotencyConflict",
    "KeptConversation",
    "LastBeat",
    "NameHolder",
    "NoRoom",
    "PackedStep",
    "ParkedRequest",
    "QueueBounds",
    "QueueFull",
    "QueueReader",
    "StepCommit",
    "StepReply",
    "StreamEntry",
    "Submitted",
    "new_id",
]


class Broker(
    GatewayVerbs,
    WorkerVerbs,
    CommitVerb,
    RegistrationVerbs,
    OperatorVerbs,
    AdapterVerbs,
    ParkingVerbs,
    ConversationVerbs,
):
    """All verbs of one lane over one command client. Raises redis-py's RedisError when Redis fails."""
