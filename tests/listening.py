"""Which addresses processes of this machine listen on."""

import re
from pathlib import Path

LOOPBACK = "0100007F"  # 127.0.0.1, as the kernel writes it


def listening(pids: list[int]) -> set[str]:
    """Addresses of all TCP sockets that these processes listen on, as the kernel writes them."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", str(entry.readlink())))
            except OSError:  # closed meanwhile
                continue
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
