"""Serve the model in a folder over HTTP: `serve`, or `Server(path).app` for an ASGI server of your own.

This part needs `pip install 'zeroforget[serve]'`.
"""

try:
    import fastapi  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(f"serving needs {error.name}: pip install 'zeroforget[serve]'") from error

from zeroforget.serving.app import Server
from zeroforget.serving.run import serve
from zeroforget.serving.settings import Settings

__all__ = ["Server", "Settings", "serve"]
