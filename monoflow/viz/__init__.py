"""Pages to look at, made from data: no scripts, nothing fetched."""

from .plan_page import page as page
from .report import report as report
