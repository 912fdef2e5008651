"""Others that compute the same: a file a library, with SUBJECTS. None is imported before it is asked for an answer."""
