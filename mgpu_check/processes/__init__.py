"""Communication between the processes of a run: messages, records, output, temporary directories. Imports no torch."""
