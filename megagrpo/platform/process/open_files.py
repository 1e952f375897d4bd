"""The limit of open files of this process and of the processes that it starts. Each HTTP request is an open file."""

from __future__ import annotations

import resource

OTHER_FILES = 1024  # that a rank has open besides the connections of its requests: libraries, data, logs, ranks


def raise_open_files(requests: int = 0) -> None:
    """Raise the soft limit of open files to the hard one. Raises ValueError when that is too low for `requests`
    requests at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if requests and hard != resource.RLIM_INFINITY and hard < (needed := requests + OTHER_FILES):
        raise ValueError(
            f"this process may open {hard:,} files, and {requests:,} requests at once need {needed:,}; raise the hard "
            "limit (`ulimit -Hn`, LimitNOFILE= of a systemd unit, nofile in /etc/security/limits.conf, "
            f"docker run --ulimit nofile={needed}), or lower rollout.max_num_seqs or rollout.prompts_per_step"
        )
