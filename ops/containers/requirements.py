"""Prints what pyproject.toml requires for some extras, so that an image's packages are one layer and its sources another.

python requirements.py gateway
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
wanted = [*project["dependencies"], *(line for extra in sys.argv[1:] for line in project["optional-dependencies"][extra])]
print("\n".join(dict.fromkeys(wanted)))
