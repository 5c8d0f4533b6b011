"""What runs in the process of the compared script: its recorder, and the replay of what ranks were given."""
