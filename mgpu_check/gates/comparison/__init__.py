"""Compare what ranks and one device have: the relations of their results, their parameters, and their samples."""
