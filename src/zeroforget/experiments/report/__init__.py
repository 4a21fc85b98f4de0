"""The report of finished runs: a page to read, and its charts as files for a paper."""

from zeroforget.experiments.report.figures import FORMATS, known_formats, write_figures
from zeroforget.experiments.report.page import page, write_report

__all__ = ["FORMATS", "known_formats", "page", "write_figures", "write_report"]
