"""A look at the images of a data set: copies, leaks and odd images, as cleanvision finds them."""
