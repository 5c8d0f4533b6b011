"""What is made of an account: files for people and machines, the verdict on a terminal, a line that lives while a run goes on."""
