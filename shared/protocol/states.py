"""States and replies of the queue protocol: the words that the Lua scripts write and return, and the transitions.

`tests/shared/test_states.py` checks that the scripts use exactly these.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class RequestState(StrEnum):
    """The field `state` of a request's hash."""

    #: In a queue; no attempt owns it.
    QUEUED = "queued"
    #: Claimed by a worker; the field `attempt` is its fencing token.
    RUNNING = "running"
    #: Set aside with its tokens: no worker computes it until `unpark`, which must come within its retention.
    PARKED = "parked"
    #: Ended; the hash and the output log expire after RETENTION_S, or after the request's own retention.
    DONE = "done"


class Transition(NamedTuple):
    """A script takes a request from one state to another; None is a request without a hash.

    script: its name in shared/protocol/scripts
    when:   the condition, as the end of a sentence that begins with the script
    """

    script: str
    before: RequestState | None
    after: RequestState | None
    when: str


#: Every transition of a request. A request whose hash is corrupt is ended by the script that meets it, as an error.
TRANSITIONS = (
    Transition("submit", None, RequestState.QUEUED, "accepts a request"),
    Transition("claim", RequestState.QUEUED, RequestState.RUNNING, "gives it to the worker that read its entry"),
    Transition("commit_step", RequestState.RUNNING, RequestState.DONE, "logs the last item of an attempt"),
    Transition("release", RequestState.RUNNING, RequestState.QUEUED, "hands back what a stopping worker has not ended"),
    Transition("park", RequestState.QUEUED, RequestState.PARKED, "sets it aside"),
    Transition("park", RequestState.RUNNING, RequestState.PARKED, "sets it aside with its tokens"),
    Transition("commit_step", RequestState.RUNNING, RequestState.PARKED, "parks it at the end of the caller's budget"),
    Transition("unpark", RequestState.PARKED, RequestState.QUEUED, "puts it at the end of its class"),
    Transition("unpark", RequestState.PARKED, RequestState.DONE, "comes after the retention"),
    Transition(
        "cancel",
        RequestState.QUEUED,
        RequestState.DONE,
        "ends it; a running request is ended by its worker, which is told",
    ),
    Transition("cancel", RequestState.PARKED, RequestState.DONE, "ends it"),
    Transition(
        "claim", RequestState.QUEUED, RequestState.DONE, "finds it cancelled, or its deadline passed or out of reach"
    ),
    Transition(
        "claim",
        RequestState.RUNNING,
        RequestState.DONE,
        "finds it cancelled, its deadline passed, or too many dead workers",
    ),
    Transition(
        "begin", RequestState.RUNNING, RequestState.DONE, "finds that it was cancelled while it waited at a worker"
    ),
    Transition("expire", RequestState.QUEUED, RequestState.DONE, "ends it after its deadline"),
    Transition("expire", RequestState.RUNNING, RequestState.DONE, "ends it after its deadline, if its worker has not"),
    Transition("expire", RequestState.PARKED, RequestState.DONE, "ends it after its retention"),
    Transition("delete", RequestState.DONE, None, "removes it with its log"),
    Transition("submit", RequestState.DONE, None, "makes room: it removes what ended long ago"),
)


class OutcomeName(StrEnum):
    """Name of the outcome of a request. Every accepted request ends with exactly one outcome."""

    #: An end token, a stop token or a stop string ended every choice.
    STOP = "stop"
    #: At least one choice reached its maximum number of tokens.
    LENGTH = "length"
    #: At least one choice repeated itself, which the call does not allow.
    REPETITION = "repetition"
    #: A client or the loss of all its listeners ended the request.
    CANCELLED = "cancelled"
    #: The deadline passed first.
    DEADLINE = "deadline"
    #: The request cannot be served; the detail says why.
    ERROR = "error"
    #: The workers of the request died too often; a copy is in the dead-letter stream.
    QUARANTINED = "quarantined"


#: Outcomes of a request whose answer is complete. A choice ends for one of these reasons, too.
COMPLETE = (OutcomeName.STOP, OutcomeName.LENGTH, OutcomeName.REPETITION)


class SubmitReply(StrEnum):
    """First element of the reply of `submit`."""

    #: The request is in the queue.
    ACCEPTED = "accepted"
    #: A request with this id was accepted before.
    DUPLICATE = "duplicate"
    #: The idempotency key stands for an earlier call with the same body.
    SAME = "same"
    #: The idempotency key stands for an earlier call with another body.
    CONFLICT = "conflict"
    #: The queue is at its bound.
    FULL = "full"
    #: The request would end after its deadline.
    LATE = "late"
    #: A limit of the API key, its project or its organisation is reached.
    LIMITED = "limited"
    #: The requests that stay in Redis take as much memory as they may, in all or of the API key.
    NO_ROOM = "no_room"
    #: Redis has lost a file that it had, so the caller must send it.
    NO_FILES = "no_files"
    #: Another response continues the conversation, or its items have changed.
    LOCKED = "locked"


class CancelReply(StrEnum):
    """Reply of `cancel`."""

    #: The request was queued or parked and is now done.
    CANCELLED = "cancelled"
    #: The request runs; its worker learns of the cancellation with the next commit.
    FLAGGED = "flagged"
    #: A listener at another gateway keeps it alive, or it is parked; nothing was done.
    WANTED = "wanted"
    #: The request had ended before.
    DONE = "done"
    #: Redis has no such request.
    UNKNOWN = "unknown"


class ExpireReply(StrEnum):
    """Reply of `expire`."""

    #: The deadline, or the retention of a parked request, has passed, and the request is now done.
    EXPIRED = "expired"
    #: Neither has passed, or the request has no deadline; nothing was done.
    EARLY = "early"
    #: The request had ended before, or was corrupt and is now done.
    DONE = "done"
    #: Redis has no such request.
    UNKNOWN = "unknown"


class ParkReply(StrEnum):
    """Reply of `park`."""

    #: The request is parked, now or from an earlier call.
    PARKED = "parked"
    #: The request was cancelled, or its deadline has passed: it is about to end; nothing was done.
    ENDING = "ending"
    #: The lane has as many parked requests as it may have; nothing was done.
    FULL = "full"
    #: The API key has as many parked requests as it may have; nothing was done.
    KEY_FULL = "key_full"
    #: The requests that stay in Redis take as much memory as they may; nothing was done.
    NO_ROOM = "no_room"
    #: Another attempt owns the request; nothing was done.
    LOST = "lost"
    #: The request had ended before, or was corrupt and is now done.
    DONE = "done"
    #: Redis has no such request.
    UNKNOWN = "unknown"


class UnparkReply(StrEnum):
    """First element of the reply of `unpark`."""

    #: The request waits in the queue of its class.
    QUEUED = "queued"
    #: The request is not parked: it waits or runs; nothing was done.
    ACTIVE = "active"
    #: A limit of the API key, its project or its organisation is reached; nothing was done.
    LIMITED = "limited"
    #: The queue is at its bound; nothing was done.
    FULL = "full"
    #: The request has ended, perhaps because its time as a parked request was over.
    DONE = "done"
    #: Redis has no such request.
    UNKNOWN = "unknown"


class DeleteReply(StrEnum):
    """Reply of `delete`."""

    #: The request had ended; its keys are gone.
    DELETED = "deleted"
    #: The request has not ended; no gateway finds it any more, and its keys expire soon after its end.
    HIDDEN = "hidden"
    #: Redis has no such request.
    UNKNOWN = "unknown"


class ClaimReply(StrEnum):
    """First element of the reply of `claim`."""

    #: The attempt owns the request.
    CLAIMED = "claimed"
    #: Nothing is left to do, and the entry is off the queue; the second element is the reason.
    DROPPED = "dropped"
    #: The entry is pending for another worker by now, or for none; nothing was done.
    LOST = "lost"


class DropReason(StrEnum):
    """Second element of the reply `dropped` of `claim`; also a RequestState, where the entry was superseded."""

    #: Redis has no such request.
    UNKNOWN = "unknown"
    #: The hash or the log of the request is corrupt; it ended as an error.
    CORRUPT = "corrupt"
    #: The request was cancelled while it waited.
    CANCELLED = "cancelled"
    #: The deadline passed while the request waited.
    DEADLINE = "deadline"
    #: The request would end after its deadline, and others wait.
    HOPELESS = "hopeless"
    #: The workers of the request died too often.
    QUARANTINED = "quarantined"
