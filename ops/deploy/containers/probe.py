"""The health check of a container: GETs a URL, prints the answer, and exits with 0 for status 200, else with 1.

python -IS probe.py http://127.0.0.1:8000/readyz
"""

import http.client
import sys
from urllib.parse import urlsplit

url = urlsplit(sys.argv[1])
connection = http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port or 80, timeout=4)
try:
    connection.request("GET", url.path)
    answer = connection.getresponse()
    print(answer.status, answer.read(1000).decode(errors="replace").strip())
    sys.exit(answer.status != 200)
except OSError as error:
    print(f"{url.netloc} does not answer: {error}")
    sys.exit(1)
