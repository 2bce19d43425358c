"""Common ground of every package: how text is shown, and how data from elsewhere is decoded."""
