"""The paper's tables as data, the ledger of our runs, the command that fills it and the report that shows it."""
