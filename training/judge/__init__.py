"""The judgement of a trained model on a split of a data set."""
