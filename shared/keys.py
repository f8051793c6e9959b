"""Every Redis key and channel of Quire, in one place (docs/protocol.md has the table).

A *lane* is a model, or one shard of a busy model. All keys of a lane carry the same Redis Cluster hash tag `{lane}`,
so a script may touch any of them.
"""

from dataclasses import dataclass

NAMESPACE = "quire"
# The consumer group that all workers of a lane share.
GROUP = "workers"
# Queues in the order in which workers look at them.
PRIORITY_CLASSES = ("interactive", "standard", "batch")
DEFAULT_CLASS = "standard"
# Queue of requests that a worker returned unfinished; read before all classes.
HANDED = "handed"
QUEUES = (HANDED, *PRIORITY_CLASSES)

# Life of a finished request's hash and output log, and of a mailbox: a client may come back for tokens that it missed.
RETENTION_S = 600
# Longest life of an idempotency key, a day. A key whose request is forgotten counts as unused.
IDEMPOTENCY_S = 86_400
# Lease of a gateway, which it renews four times as often. After it, requests that only this gateway listens to are
# orphans.
GATEWAY_TTL_S = 10
# Time between two heartbeats of a worker.
BEAT_S = 1.0
# Life of a worker's heartbeat: a few lost or late beats do not make it count as stuck.
WORKER_TTL_S = 5
# Life of an entry in the set of workers after its last heartbeat: names of workers that are gone must not pile up.
FORGET_WORKER_S = 3600
# Life of a gateway's request for views of a worker's engine; renewed while the page /engine is open.
VIEW_TTL_S = 3.0
# Length of the dead-letter stream; Redis drops the oldest entries beyond it.
MAX_DEAD = 1000


@dataclass(frozen=True, slots=True)
class LaneKeys:
    """The keys of one lane. Scripts build the keys of a request from `prefix`."""

    lane: str

    @property
    def prefix(self) -> str:
        return f"{NAMESPACE}:{{{self.lane}}}:"

    def queue(self, name: str = DEFAULT_CLASS) -> str:
        """Stream of waiting and running requests, one of QUEUES; entries hold `id` and `cost` only."""
        return f"{self.prefix}queue:{name}"

    def request(self, request_id: str) -> str:
        """Hash of a request: body, about, state, attempt, owner, gateway, emitted, deaths, outcome, ..."""
        return f"{self.prefix}req:{request_id}"

    def output(self, request_id: str) -> str:
        """Stream: the output log, entry id `<tokens so far>-0`."""
        return f"{self.prefix}out:{request_id}"

    def idempotency(self, key: str) -> str:
        """Hash with a TTL: which call an idempotency key stands for."""
        return f"{self.prefix}idem:{key}"

    @property
    def dead(self) -> str:
        """Dead-letter stream: requests that were quarantined because their workers died."""
        return f"{self.prefix}dead"

    @property
    def load(self) -> str:
        """Hash: queued requests and tokens, in total and by class; the scripts keep it exact."""
        return f"{self.prefix}load"

    @property
    def totals(self) -> str:
        """Hash of counters: accepted, and one per outcome."""
        return f"{self.prefix}totals"

    @property
    def recoveries(self) -> str:
        """Hash of counters of recovery (`Broker.read_recoveries`)."""
        return f"{self.prefix}recoveries"

    @property
    def workers(self) -> str:
        """Sorted set: worker id by Redis time (ms) of its last beat."""
        return f"{self.prefix}workers"

    def worker(self, worker_id: str) -> str:
        """Hash with a TTL: the heartbeat of one worker."""
        return f"{self.prefix}worker:{worker_id}"

    def mailbox(self, worker_id: str) -> str:
        """Hash request id -> notice, read and emptied by the worker's next `commit_step`."""
        return f"{self.prefix}worker:{worker_id}:mailbox"

    def view(self, worker_id: str) -> str:
        """String with a TTL: a gateway wants views of this worker's engine. Also the pub/sub channel of the views."""
        return f"{self.prefix}view:{worker_id}"

    def channel(self, gateway_id: str) -> str:
        """Pub/sub channel of the step frames that are meant for one gateway."""
        return f"{self.prefix}gateway:{gateway_id}"

    def gateway_lease(self, gateway_id: str) -> str:
        """String with a TTL, the lease of a gateway. Without it the requests of its clients are orphans."""
        return f"{self.prefix}gateway:{gateway_id}:alive"
