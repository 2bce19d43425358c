"""A look at what is in a data set: copies, odd images, classes, and labels that a model doubts."""
