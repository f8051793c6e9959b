"""Tensor parallelism: one model on several devices of one machine (PagedAttention, section 4.6).

The worker's process is rank 0, the leader: it has the scheduler, the block manager and the sampler, and talks to Redis.
Each other rank is a follower: a process with its part of every layer and, in every block, the keys and values of its
attention heads. So one block table serves all ranks, and blocks are allocated, copied and swapped by number on all.

For each call of the model the leader sends an order of a few numbers to every follower (`leader.py`, `follower.py`),
and then broadcasts the batch. All ranks compute; collective operations (`collectives.py`) all-reduce products and
gather logits at the leader: by NCCL between GPUs, by shared memory between processes on CPUs. Followers know no
requests.

Ranks live and die together. The death of a follower ends the worker, whose requests other workers continue; the death
of the leader ends its followers.
"""
