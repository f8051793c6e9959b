"""A folder of models on one machine: a process that starts and stops a worker for each model that calls ask for.

The paper's engine knows nothing of it. A worker stays a process of one model; the host registers all models of the
folder, looks at their queues, and decides which of them have a worker. Requests wait in Redis meanwhile.
"""
