"""Where other libraries' users are at home: their interfaces, and plots; each library is imported when it is used."""
