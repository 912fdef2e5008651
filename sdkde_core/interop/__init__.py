"""Where other libraries' users are at home: their estimators' interfaces, each with its library imported when used."""
