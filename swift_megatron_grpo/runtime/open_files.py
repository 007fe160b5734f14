"""The limit on open files of a process. Every connection counts as one."""

import resource


def allow_open_files(number: int) -> None:
    """Raise this process's limit as far as it may, and to no more than this number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
