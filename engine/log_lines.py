"""`log_lines`: how all of Kaon's processes log: a line each, with the time, the process, the level and the module."""

import logging


def log_lines(process: str, level: str, more: str = "") -> logging.Handler:
    """Have this process log to standard error from `level` on, and name itself so; what writes the lines.

    `more`: of the record, for the end of each line.
    """
    form = logging.Formatter(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s{more}")
    form.default_msec_format = "%s.%03d"
    handler = logging.StreamHandler()
    handler.setFormatter(form)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    return handler
