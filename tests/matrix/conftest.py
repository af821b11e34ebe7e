"""Says at the end how many answers of the matrix took the other side of a near-tie: they pass, and are counted."""


def pytest_terminal_summary(terminalreporter):
    counts = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", [])
        if name == "near_ties" and report.when == "call"
    ]
    if counts:
        terminalreporter.write_line(f"equality matrix: {len(counts)} settings, {sum(counts)} near-ties taken the other way")
