# Rscript estimates.R logspline|ks density|sample FOLDER: see estimates.py. FOLDER has train.csv and given.csv, and gets
# result.csv: log densities at the given points, or so many samples with that seed.
arguments <- commandArgs(trailingOnly = TRUE)
read <- function(name) as.matrix(read.csv(file.path(arguments[3], name), header = FALSE))
x <- unname(read("train.csv"))
given <- unname(read("given.csv"))
d <- ncol(x)
if (arguments[2] == "sample") set.seed(given[2])
if (arguments[1] == "logspline") {
  fit <- logspline::logspline(x[, 1])
  result <- if (arguments[2] == "sample") logspline::rlogspline(given[1], fit) else log(logspline::dlogspline(given[, 1], fit))
} else {
  H <- if (d == 1) ks::hpi(x[, 1]) else ks::Hpi(x)
  root <- if (d == 1) matrix(H) else chol(H)
  if (arguments[2] == "sample") {
    result <- x[sample(nrow(x), given[1], replace = TRUE), , drop = FALSE] + matrix(rnorm(given[1] * d), ncol = d) %*% root
  } else {
    points <- if (d == 1) given[, 1] else given
    fit <- if (d == 1) ks::kde(x[, 1], h = H, eval.points = points) else ks::kde(x, H = H, eval.points = points, binned = FALSE)
    result <- log(pmax(fit$estimate, 0))
  }
}
write.table(result, file.path(arguments[3], "result.csv"), sep = ",", row.names = FALSE, col.names = FALSE)
