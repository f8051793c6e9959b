"""Prints what pyproject.toml requires for some extras: an image's packages are one layer, and its sources another.

python requirements.py gateway
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [project["optional-dependencies"][name] for name in sys.argv[1:]]
wanted = [line for lines in (project["dependencies"], *extras) for line in lines]
print("\n".join(dict.fromkeys(wanted)))
