"""The settings offer exactly the formats that exist, without importing them."""

import subprocess
import sys

from quire.gateway.output import format_names, formats


def test_the_names_are_those_of_the_formats() -> None:
    assert list(format_names.TOOL_CALL_FORMATS) == list(formats.FORMATS)
    assert list(format_names.REASONING_FORMATS) == list(formats.REASONING_FORMATS)


def test_settings_import_no_grammars() -> None:
    code = "import sys, quire.gateway.settings; print('llguidance' in sys.modules, 'jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
