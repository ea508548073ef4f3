"""What an administrator does with the blacklist."""

from federation.admin.blacklist.csv_lists import CsvError, LineNote
from federation.admin.blacklist.importing import BadRows, Changed, Imported, ImportPlan, apply_import, plan_import
from federation.admin.blacklist.rows import Entry, RuleError, WantedRule
from federation.admin.blacklist.rules import Change, Page, add, check, export_csv, list_rules, remove
from federation.servers.blacklist import purge_expired

__all__ = [
    "BadRows",
    "Change",
    "Changed",
    "CsvError",
    "Entry",
    "ImportPlan",
    "Imported",
    "LineNote",
    "Page",
    "RuleError",
    "WantedRule",
    "add",
    "apply_import",
    "check",
    "export_csv",
    "list_rules",
    "plan_import",
    "purge_expired",
    "remove",
]
