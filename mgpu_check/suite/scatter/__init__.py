"""Property: shards cover the batch exactly, and gather to it again."""
