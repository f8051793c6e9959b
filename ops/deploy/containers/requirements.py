"""Prints the requirements in the pyproject.toml of the working directory, with those of the extras given.

An image installs the requirements in a layer of their own. The build reuses that layer when only the sources change.

python requirements.py tracing
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [project["optional-dependencies"][name] for name in sys.argv[1:]]
wanted = [line for lines in (project["dependencies"], *extras) for line in lines]
print("\n".join(dict.fromkeys(wanted)))
