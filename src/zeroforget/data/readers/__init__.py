"""One module for each way of laying a data set out in files."""
