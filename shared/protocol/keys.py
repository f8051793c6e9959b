"""Every Redis key and channel of Quire, in one place (docs/protocol.md has the table).

A *lane* is a model, or one shard of a busy model. All keys of a lane carry the same Redis Cluster hash tag `{lane}`,
so a script may touch any of them.
"""

import hashlib
from dataclasses import dataclass

NAMESPACE = "quire"
# The consumer group that all workers of a lane share.
GROUP = "workers"
# The class of batch lines.
BATCH_CLASS = "batch"
# Queues in the order in which workers look at them.
PRIORITY_CLASSES = ("interactive", "standard", BATCH_CLASS)
DEFAULT_CLASS = "standard"
# Queue of requests that a worker returned unfinished; read before all classes.
HANDED = "handed"
QUEUES = (HANDED, *PRIORITY_CLASSES)
# Prefix of the queues of requests that wait in the lines of their users, one for each class. No worker reads them: a
# request moves to the queue of its class when it is taken.
WAITING = "waiting:"
WAITING_QUEUES = tuple(WAITING + name for name in PRIORITY_CLASSES)

# Life of a finished request's hash and output log, and of a mailbox: a client may come back for tokens that it missed.
RETENTION_S = 600
# Longest retention that a request may have of its own: 30 days.
MAX_RETENTION_S = 30 * 86_400
# Longest time for which a request may be parked, by default: 7 days.
PARKING_S = 7 * 86_400
# Life of the keys of a request that was deleted before its end: gateways read the end from the log.
HIDDEN_RETENTION_S = 60
# Estimated bytes that Redis takes for a stored request besides its metadata, its conversation and its log, and for a
# token of the log.
STORED_BYTES = 2048
LOG_BYTES_PER_TOKEN = 64
# Metadata of a call, in bytes, from which its requests count among those that stay in Redis.
LARGE_BYTES = 65_536
# Longest life of an idempotency key, a day. A key whose request is forgotten counts as unused.
IDEMPOTENCY_S = 86_400
# Lease of a gateway, which it renews four times as often. After it, requests that only this gateway listens to are
# orphans.
GATEWAY_TTL_S = 10
# Time between two heartbeats of a worker.
BEAT_S = 1.0
# Life of a worker's heartbeat: a few lost or late beats do not make it count as stuck.
WORKER_TTL_S = 5
# Life of an entry in the set of workers, and of the stream `left` of a worker, after its last heartbeat: names of
# workers that are gone must not pile up.
FORGET_WORKER_S = 3600
# Life of a gateway's request for views of a worker's engine; renewed while the page /engine is open.
VIEW_TTL_S = 3.0
# Life of the registration of a model after the last beat of its last worker.
MODEL_TTL_S = 3600
# Time between two renewals of a worker's registration of its model.
REGISTER_S = 5.0
# Life of the card of a model host, which it renews with every heartbeat, and of its lease on a load.
HOST_TTL_S = 5
# Life of the usage of a day: 400 days.
USAGE_S = 400 * 86_400
# Length of the audit stream of accounts; Redis drops the oldest entries beyond it.
MAX_AUDIT = 100_000
# Length of the dead-letter stream; Redis drops the oldest entries beyond it.
MAX_DEAD = 1000


# The hash tag of accounts: API keys, projects and organisations. They belong to no lane.
ACCOUNTS_TAG = "accounts"


def image_name(tenant: str, digest: str) -> str:
    """Return the name under which the requests of a tenant share the file of an image with this digest."""
    return hashlib.sha256(f"{tenant}\0{digest}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class AccountKeys:
    """The keys of all accounts, which share one hash tag."""

    tag: str = ACCOUNTS_TAG

    @property
    def prefix(self) -> str:
        return f"{NAMESPACE}:{{{self.tag}}}:"

    @property
    def accounts(self) -> str:
        """Hash: API keys, projects and organisations as JSON, by `<kind>:<id>`."""
        return f"{self.prefix}accounts"

    @property
    def audit(self) -> str:
        """Stream: every change of an account, with the actor and without secrets."""
        return f"{self.prefix}audit"

    def spent(self, place: str) -> str:
        """Hash: what an account has spent today, this month and per minute, open reservations included."""
        return f"{self.prefix}spent:{place}"

    def usage(self, day: int | str) -> str:
        """Hash: requests, tokens and costs of requests that were accepted on a day since 1970, by key and model."""
        return f"{self.prefix}usage:{day}"


@dataclass(frozen=True, slots=True)
class LaneKeys:
    """The keys of one lane. Scripts build the keys of a request from `prefix`."""

    lane: str

    @property
    def prefix(self) -> str:
        return f"{NAMESPACE}:{{{self.lane}}}:"

    def queue(self, name: str = DEFAULT_CLASS) -> str:
        """Stream of requests, one of QUEUES or of WAITING_QUEUES; entries hold `id` and `cost` only."""
        return f"{self.prefix}queue:{name}"

    def tenants(self, priority_class: str) -> str:
        """Sorted set: tenants that wait in a class, by a lower bound of their counters."""
        return f"{self.prefix}tenants:{priority_class}"

    def users(self, priority_class: str, tenant: str) -> str:
        """Sorted set: users of a tenant that wait in a class, by a lower bound of their counters."""
        return f"{self.prefix}users:{priority_class}:{tenant}"

    def served(self, priority_class: str, tenant: str = "") -> str:
        """Hash: counters of the tenants of a class; of the users of a tenant, with a TTL."""
        return f"{self.prefix}served:{priority_class}" + (f":{tenant}" if tenant else "")

    def line(self, priority_class: str, tenant: str, user: str = "") -> str:
        """Sorted set: entries of the requests of a user that wait in a class, by arrival."""
        return f"{self.prefix}line:{priority_class}:{tenant}:{user}"

    @property
    def waiting(self) -> str:
        """Hash: requests and tokens that each tenant has in its lines."""
        return f"{self.prefix}waiting"

    @property
    def wake(self) -> str:
        """Stream with at most one entry, which ends the blocking read of one idle worker."""
        return f"{self.prefix}wake"

    def request(self, request_id: str) -> str:
        """Hash of a request: body, metadata, state, attempt, owner, gateway, emitted, deaths, outcome, ..."""
        return f"{self.prefix}req:{request_id}"

    def output(self, request_id: str) -> str:
        """Stream: the output log, entry id `<tokens so far>-0`."""
        return f"{self.prefix}out:{request_id}"

    def conversation(self, request_id: str) -> str:
        """String: the conversation of a stored response, as compressed JSON; lives as long as the request's hash."""
        return f"{self.prefix}conversation:{request_id}"

    def kept_conversation(self, conversation_id: str) -> str:
        """Hash: a conversation of the API: version, owner, time, metadata, items, the response that continues it."""
        return f"{self.prefix}conv:{conversation_id}"

    @property
    def answering(self) -> str:
        """Set: conversations that a response continues, until its items are added."""
        return f"{self.prefix}answering"

    def image(self, name: str) -> str:
        """String: the file of an image, as long as a request names it (see _images.lua). name: of `image_name`."""
        return f"{self.prefix}image:{name}"

    def idempotency(self, key: str) -> str:
        """Hash with a TTL: which call an idempotency key stands for."""
        return f"{self.prefix}idem:{key}"

    @property
    def held(self) -> str:
        """Hash: bytes and owner of each request that stays (see _stored.lua)."""
        return f"{self.prefix}held"

    @property
    def holders(self) -> str:
        """Sorted set: owners of requests that stay, by the bytes of these requests."""
        return f"{self.prefix}holders"

    @property
    def due(self) -> str:
        """Sorted set: requests that stay, by the Redis time (ms) at which a script looks for their keys."""
        return f"{self.prefix}due"

    def ended(self, owner: str) -> str:
        """Sorted set: requests of an owner that stay and have ended, by the Redis time (ms) of their end."""
        return f"{self.prefix}ended:{owner}"

    def parked_of(self, owner: str) -> str:
        """Set: parked requests of an owner."""
        return f"{self.prefix}parked:{owner}"

    @property
    def reserved(self) -> str:
        """Hash: the reservation of each request that has not ended and has an API key."""
        return f"{self.prefix}reserved"

    @property
    def parked(self) -> str:
        """Sorted set: parked requests by the Redis time (ms) at which they end as parked."""
        return f"{self.prefix}parked"

    @property
    def adapters(self) -> str:
        """Hash: LoRA adapters that all workers are to load, by name, with path and stamp as JSON."""
        return f"{self.prefix}adapters"

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
        """Hash of counters since Redis was empty: migrations, fenced, repairs and corrupt."""
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

    def left(self, worker_id: str) -> str:
        """Stream: requests that are left to one worker, because it holds a prefix of them (see _affinity.lua)."""
        return f"{self.prefix}worker:{worker_id}:left"

    @property
    def prefixes(self) -> str:
        """Hash: the holders of prefixes; with `:before` behind its name those that were noted earlier."""
        return f"{self.prefix}prefixes"

    def view(self, worker_id: str) -> str:
        """String with a TTL: a gateway wants views of this worker's engine. Also the pub/sub channel of the views."""
        return f"{self.prefix}view:{worker_id}"

    def channel(self, gateway_id: str) -> str:
        """Pub/sub channel of the step frames that are meant for one gateway."""
        return f"{self.prefix}gateway:{gateway_id}"

    @property
    def endings(self) -> str:
        """Pub/sub channel: the id of each request that ends."""
        return f"{self.prefix}endings"

    def gateway_lease(self, gateway_id: str) -> str:
        """String with a TTL, the lease of a gateway. Without it the requests of its clients are orphans."""
        return f"{self.prefix}gateway:{gateway_id}:alive"


# The hash tag of files and batches, which belong to no lane either; no model can have this name, because of its `!`.
BATCHES_TAG = "batches!"
# Lease of a gateway on a window of a batch, which it renews ten times as often.
WINDOW_LEASE_S = 5.0
# Life of a batch's record after its end, and of the record of a batch that no gateway ends: 40 days.
BATCH_RETENTION_S = 40 * 86_400
# Life of an ended line of a batch until a gateway has collected it: 15 days, a day longer than the longest batch.
LINE_RETENTION_S = 15 * 86_400
# Lease of a gateway on an upload that has not ended, which it renews four times as often. After it, the bytes that the
# upload has reserved are free again.
UPLOAD_LEASE_S = 60


@dataclass(frozen=True, slots=True)
class BatchKeys:
    """The keys of files and batches, which share one hash tag. Scripts build them from `prefix`."""

    prefix: str = f"{NAMESPACE}:{{{BATCHES_TAG}}}:"

    def file(self, file_id: str) -> str:
        """Hash: the record of a file."""
        return f"{self.prefix}file:{file_id}"

    def parts(self, file_id: str) -> str:
        """Hash: the objects that are the content of a file, by number, each with its size."""
        return f"{self.prefix}parts:{file_id}"

    def files(self, owner: str) -> str:
        """Sorted set: the complete files of an owner by the time (ms) at which they were created."""
        return f"{self.prefix}files:{owner}"

    @property
    def expiring(self) -> str:
        """Sorted set: files by the time (s) after which they are deleted, uploads that have not ended included."""
        return f"{self.prefix}expiring"

    @property
    def doomed(self) -> str:
        """Set: files whose records are deleted, and whose objects may still be stored."""
        return f"{self.prefix}doomed"

    @property
    def used(self) -> str:
        """Hash: the bytes of all files, in total and by owner, reservations of uploads included."""
        return f"{self.prefix}used"

    def batch(self, batch_id: str) -> str:
        """Hash: the record of a batch."""
        return f"{self.prefix}batch:{batch_id}"

    def windows(self, batch_id: str) -> str:
        """List: offset and number of the line at which each window of the input begins, and those of the end."""
        return f"{self.prefix}windows:{batch_id}"

    def leases(self, batch_id: str) -> str:
        """Sorted set: the windows that a gateway has begun and not closed, by the end (ms) of its lease."""
        return f"{self.prefix}leases:{batch_id}"

    def open(self, batch_id: str) -> str:
        """Hash: fencing token, progress and state of each window in `leases`."""
        return f"{self.prefix}open:{batch_id}"

    def batches(self, owner: str) -> str:
        """Sorted set: the batches of an owner by the time (ms) at which they were created."""
        return f"{self.prefix}batches:{owner}"

    @property
    def active(self) -> str:
        """Sorted set: the batches that have not ended by the time (ms) at which they were created."""
        return f"{self.prefix}active"


# The name under which the registrations of all models are kept, as if it were a lane: no model can have it, because of
# its `!`. All keys are in one slot of a Redis Cluster.
REGISTRY_LANE = "models!"


@dataclass(frozen=True, slots=True)
class RegistryKeys:
    """The keys of the model registry: what workers serve, and the files with which gateways make tokens of texts."""

    prefix: str = f"{NAMESPACE}:{{{REGISTRY_LANE}}}:"

    @property
    def models(self) -> str:
        """Sorted set: names of models by the Redis time (ms) at which a worker last registered them."""
        return f"{self.prefix}models"

    def manifest(self, name: str) -> str:
        """String with a TTL: the manifest of a model, which names its files by their digests."""
        return f"{self.prefix}manifest:{name}"

    def file(self, digest: str) -> str:
        """String with a TTL: the content of a file, under its SHA-256 digest in hexadecimal."""
        return f"{self.prefix}file:{digest}"

    @property
    def hosts(self) -> str:
        """Sorted set: ids of model hosts by the Redis time (ms) of their last beat."""
        return f"{self.prefix}hosts"

    def host(self, host_id: str) -> str:
        """String with a TTL: the card of a model host: the models of its folder and their states."""
        return f"{self.prefix}host:{host_id}"

    def loading(self, name: str) -> str:
        """String with a TTL: the host that loads a model; no other host loads it meanwhile."""
        return f"{self.prefix}loading:{name}"
