"""The models of a gateway process, and the calls that they serve.

`service` has the parts of a process and of each model, `model_directory` which models there are, `dispatch` which one a
request means. `calls`, `embedding_calls` and `pooled_calls` serve a call with one model.
"""
