"""Pages of runs on 127.0.0.1: one run while it goes on, or all runs of a folder."""

from tfgrpo.report.served.all_runs import serve_all
from tfgrpo.report.served.one_run import serve_live
from tfgrpo.report.served.server import LiveServer

__all__ = ["LiveServer", "serve_all", "serve_live"]
