"""The pages in a browser: `static_files` serves `static/`, and `engine_page` the data of `/engine`."""
