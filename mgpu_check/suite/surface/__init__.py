"""Record the calls of torch in a run of the suite, and the classes of their arguments, and list what is never drawn."""
