"""A plan as one HTML page that needs nothing else."""

from m2ncompile.report.data import report
from m2ncompile.report.page import page
from m2ncompile.report.records import Report

__all__ = ["Report", "page", "report"]
