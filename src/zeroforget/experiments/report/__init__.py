"""The report of finished runs: a page to read, and its charts as files for a paper."""

from zeroforget.experiments.report.figures import FORMATS, known_formats, write_figures
from zeroforget.experiments.report.page import is_report, page, write_report

__all__ = ["FORMATS", "is_report", "known_formats", "page", "write_figures", "write_report"]
