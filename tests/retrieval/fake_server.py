"""A retrieval server on a real socket that answers as it is told to."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HANG_UP = object()


def document(query, i):
    return {"id": f"{query}-{i}", "contents": f"t{i}\nof {query}"}


def good(asked):
    """What a server of Search-R1's form answers."""
    rows = [[{"document": document(q, i), "score": -i} for i in range(asked["topk"])] for q in asked["queries"]]
    return {"result": rows}


class FakeServer:
    """`script`: what the next requests get, then `usual`: bytes or JSON for 200, (status, JSON or bytes, headers),
    HANG_UP, or a function of the request that gives one of these. `asked` are the requests so far."""

    def __init__(self, usual=good):
        self.script, self.usual, self.asked, self.connections = [], usual, [], 0
        self.health = []  # the same for GET /health; then 404
        self.lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(handler):
                self.connections += 1
                super().setup()

            def do_GET(handler):
                with self.lock:
                    told = self.health.pop(0) if self.health else (404, {"detail": "Not Found"})
                self.answer(handler, told)

            def do_POST(handler):
                asked = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
                with self.lock:
                    self.asked.append(asked)
                    told = self.script.pop(0) if self.script else self.usual
                while callable(told):
                    told = told(asked)
                self.answer(handler, told)

            def log_message(handler, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def answer(self, handler, told):
        if told is HANG_UP:
            handler.close_connection = True
            return
        status, content, *headers = told if isinstance(told, tuple) else (200, told)
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        with contextlib.suppress(OSError):  # nobody waits any more
            handler.send_response(status)
            for name, value in (headers[0] if headers else {}).items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
