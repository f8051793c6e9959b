"""Runs the cases of a program, and prints the outcome of each as a line of JSON. Imports only the standard library."""

import asyncio
import inspect
import json
import sys
import traceback


def run(*cases, **named):
    """Call each case with the URL of the API. A result is printed as JSON, and an exception as its traceback.

    named: further cases by their names.
    """
    url = f"{sys.argv[1]}/v1"
    for name, case in {**{case.__name__: case for case in cases}, **named}.items():
        outcome = {"case": name}
        try:
            outcome["result"] = asyncio.run(case(url)) if inspect.iscoroutinefunction(case) else case(url)
        except Exception:
            outcome["error"] = traceback.format_exc()
        print(json.dumps(outcome), flush=True)
