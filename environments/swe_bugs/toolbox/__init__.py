"""Small tools without dependencies; every module stands alone."""
