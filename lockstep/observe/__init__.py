"""What a run leaves behind: its folder, metrics, progress and report."""

from lockstep.observe.curves import curves_png
from lockstep.observe.metrics import MetricsWriter, read_metrics
from lockstep.observe.progress import Progress
from lockstep.observe.report import write_report
from lockstep.observe.run_folder import RunFolder, open_run

__all__ = ["MetricsWriter", "Progress", "RunFolder", "curves_png", "open_run", "read_metrics", "write_report"]
