"""The self-test of the kernels on the machine that serves: each kernel that a model uses, against float32 in torch.

A worker runs it at start (`quire.worker.device.self_test`). A kernel with wrong results is replaced if something can
replace it, and refused otherwise. `registry.cases_of` lists the cases, and `cases.run_cases` runs them.
"""
