"""One reader per kind of file: text in, facts out. A reader judges nothing and executes nothing."""
