"""x"""
from mgpu_check.gate.report import Report, Observable
def investigate(trials, failed, allowed):
    v = failed.verdict
    if v is None:
        return Report(str(failed.error).splitlines()[0], failed.scenario.described)
    return Report("differs", failed.scenario.described, [Observable(n, r, v.details.get(n, "")) for n, r in v.relations.items()], (), v.remarks)
def report_of_hang(*a):
    pass
