"""The pages in a browser, their data, and the endpoints that describe a gateway.

`static_files` serves `static/`; `engine_page` serves the data of `/engine`; `status` serves models, health and status.
"""
