"""What a run logs: its folder, metrics, log, timeline, progress bar and report."""

from lockstep.observe.compare import Comparison, compare_runs
from lockstep.observe.curves import curves_png
from lockstep.observe.expert_load import expert_load_png
from lockstep.observe.logs import log
from lockstep.observe.metrics import MetricsWriter, awaits_validation, read_metrics
from lockstep.observe.observer import Observer, OnMetrics, require_observers
from lockstep.observe.report import write_report
from lockstep.observe.run_folder import RunFolder, append_step, claim_run, open_run
from lockstep.observe.speed import memory_gib, peak_flops, training_flops
from lockstep.observe.start import announce, in_short, start_line
from lockstep.observe.tables import Table
from lockstep.observe.timeline import Timeline, merge_timelines

__all__ = [
    "Comparison",
    "MetricsWriter",
    "Observer",
    "OnMetrics",
    "RunFolder",
    "Table",
    "Timeline",
    "announce",
    "append_step",
    "awaits_validation",
    "claim_run",
    "compare_runs",
    "curves_png",
    "expert_load_png",
    "in_short",
    "log",
    "memory_gib",
    "merge_timelines",
    "open_run",
    "peak_flops",
    "read_metrics",
    "require_observers",
    "start_line",
    "training_flops",
    "write_report",
]
