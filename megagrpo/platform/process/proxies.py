"""The environment's HTTP proxies: which of them httpx can use, and this host as their exception."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import MutableMapping
from urllib.parse import urlsplit

PROXIES = "HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy all_proxy"
UNPROXIED = "NO_PROXY no_proxy"


def proxy_problem(value: str) -> tuple[str, str] | None:
    """Return why httpx cannot use a proxy, and the fix; None when it can."""
    try:
        parts = urlsplit(value if "://" in value else f"http://{value}")
        _ = parts.port
    except ValueError:
        return "this is not the address of a proxy", "correct or unset it"
    if parts.scheme not in ("http", "https", "socks5", "socks5h"):
        return f"httpx knows no proxies of the kind {parts.scheme}", "write http, https or socks5, or unset it"
    if parts.scheme.startswith("socks") and importlib.util.find_spec("socksio") is None:
        return "SOCKS proxies need the package socksio, which is not installed", "pip install socksio, or unset it"
    return None


def reach_loopback_directly(environment: MutableMapping[str, str]) -> None:
    """Except this host from proxies, so that trackers and rewards reach their servers on it."""
    if not any(environment.get(name) for name in PROXIES.split()):
        return
    for name in UNPROXIED.split():
        hosts = [host for host in re.split(r"[,\s]+", environment.get(name, "")) if host]
        if "*" not in hosts:
            environment[name] = ",".join(dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"]))
