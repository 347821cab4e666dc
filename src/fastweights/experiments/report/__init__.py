"""The report: the paper's numbers beside ours, as Markdown pages, csv files, one figure and a page of HTML."""
