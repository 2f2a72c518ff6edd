#!/usr/bin/env python3
"""Takes jobs over (202) and finishes them later: says that it is at work, and how each ended, to the daemon that `callback` names.

    [api]
    listen = "127.0.0.1:7171"
    public_url = "http://127.0.0.1:7171"
    [handlers.render]
    http = { url = "http://127.0.0.1:8080/", hold = "1m" }

    PORT=8080 handlers/examples/python/later.py
"""

import http.server
import json
import os
import threading
import time
import urllib.error
import urllib.request

def say(job, what, **more):
    """Says it until somebody can tell what became of it. None: this run is over, and nothing of it counts."""
    body = json.dumps({"token": job["token"], **more}).encode()
    headers = {"Content-Type": "application/json"}
    while True:
        try:
            request = urllib.request.Request(f"{job['callback']}/{what}", body, headers)
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code in (404, 409):
                return None
            if error.code != 503:
                raise
            time.sleep(float(error.headers.get("Retry-After", 2)))
        except OSError:
            time.sleep(2)  # The daemon is away. Any other will do as well, and the job stays ours for its `hold`.


def keep(job, over):
    """Three heartbeats in the time that each gives."""
    while not over.wait(20):
        kept = say(job, "heartbeat", **{"for": "1m"})
        if kept is None or kept["stop"]:
            over.set()


def work(job):
    over = threading.Event()  # it has ended, or is not ours any more
    threading.Thread(target=keep, args=(job, over), daemon=True).start()
    try:
        pages = 0
        for _ in range(job["data"]["pages"]):
            if over.is_set():
                return
            time.sleep(0.01)
            pages += 1
        say(job, "complete", result={"pages": pages})
    except (KeyError, TypeError) as error:
        say(job, "fail", message=f"wrong data: {error!r}", retry=False)
    finally:
        over.set()


class Receiver(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        threading.Thread(target=work, args=(job,)).start()
        self.send_response(202)
        self.send_header("Content-Length", "0")
        self.end_headers()


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", 8080))), Receiver).serve_forever()
