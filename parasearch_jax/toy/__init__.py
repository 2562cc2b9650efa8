"""The small world: generator, corpus, questions, base checkpoint, and the recipe that made it."""
