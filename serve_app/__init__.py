"""Serve large language models with vLLM from a pre-warmed pool of Ray Serve replicas.

`serve run serve_app:app` imports this module and calls `app`; it must stay light, so everything heavy hides behind
`app`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__version__ = "0.1.0"

# `serve run serve_app:app` imports this module before it starts Ray, so what Ray Serve's own processes must find in
# their environment is set here. Where Ray runs already, `configs/*.yaml` and cluster/ set the same names.
PROXY_CALLBACK = "serve_app.pool.proxy.middlewares"
SERVE_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PROXY_CALLBACK,
    "RAY_SERVE_DEPLOYMENT_ACTOR_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
    # Half the CPU time of a streamed event, in proxy and slot: docs/data_path.md.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
}
# The same for Ray's own: every worker imports this module, which does nothing unless a slot has asked for a spare.
PRELOAD_MODULE = "serve_app.engine.spare"
RAY_ENVIRONMENT = {"RAY_preload_python_modules": PRELOAD_MODULE}
for _name, _value in (SERVE_ENVIRONMENT | RAY_ENVIRONMENT).items():
    os.environ.setdefault(_name, _value)


def app(args: dict[str, Any]) -> Application:
    """Build the Serve application from the `args` of a Serve config file or of the command line.

    Raises:
        serve_app.errors.ConfigError: a key is unknown, has a wrong value, or contradicts another one.
    """
    from serve_app.application import build

    return build(args)
