"""A model over several devices of one machine (tensor parallelism; PagedAttention, section 4.6).

The worker process is rank 0, the leader: it has the scheduler, the block manager and the sampler, and speaks to Redis.
Each other rank is a process that has its part of every layer, and of every block the keys and values of its heads. So
one block table does for all of them, and blocks are allocated, copied and swapped by number, everywhere alike.

For each call of the model the leader sends an order of a few numbers to every follower (`leader.py`, `follower.py`),
then the batch itself by one broadcast. All ranks compute; products are added up, and logits come to the leader, by
collective operations (`collectives.py`): NCCL's between GPUs, memory that all map between processes on CPUs. Nobody
waits for a scheduler in between, and followers know nothing of requests.

Ranks live and die together. A follower's death ends the worker, whose requests other workers go on with; the leader's
death ends its followers.
"""
